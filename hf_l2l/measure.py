"""Memory of a training run: bytes on the device and on the host.

`MemoryCallback` works under plain `Trainer` and under `L2LTrainer`, so that the two can be compared;
`DeviceMemoryTrace` samples the device's memory over time.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from transformers import TrainerCallback

from hf_l2l.hf.attach import attachment_of
from hf_l2l.memory.host_limits import peak_process_bytes
from hf_l2l.report.host_tensors import host_tensors
from hf_l2l.runtime import stream
from hf_l2l.runtime.tensors import tensor_bytes


class MemoryCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Measures a training run; `metrics()` returns the result after its end."""

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._device_bytes: int | None = None
        self._host_bytes: dict[str, int] = {}
        self._steps = 0

    def metrics(self) -> dict[str, int]:
        """Bytes by name.

        `train_device_bytes`: peak of tensors on the device, by the device's own counter; absent on the CPU, which has
        none. `train_host_bytes`: weights, gradients, optimizer state and 16-bit copies in host memory.
        `train_process_bytes`: peak memory of the process, including Python, libraries and, on a simulated accelerator,
        the device's memory; absent if the system does not report it.
        """
        found = {"train_device_bytes": self._device_bytes, "train_host_bytes": sum(self._host_bytes.values())}
        found["train_process_bytes"] = peak_process_bytes()
        return {name: value for name, value in found.items() if value is not None}

    def on_train_begin(self, args: Any, *rest: Any, **kwargs: Any) -> None:
        """Reset the device's peak."""
        self._steps = 0
        if args.device != stream.HOST:
            self._device = args.device
            torch.accelerator.reset_peak_memory_stats(args.device)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Count the host's tensors while gradients exist."""
        self._count(*args, **kwargs)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Count the host's tensors after the optimizer has created its state."""
        self._count(*args, **kwargs)
        self._steps += 1

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Read the device's counter."""
        if self._device is not None:
            self._device_bytes = torch.accelerator.max_memory_allocated(self._device)

    def _count(self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Any, **kwargs: Any) -> None:
        if self._steps > 1:  # nothing is allocated after the first steps
            return
        attached = attachment_of(model)
        copies = None if attached is None else attached.eps.copies.kept
        for kind, tensors in host_tensors(model, [optimizer], copies).items():
            self._host_bytes[kind] = max(self._host_bytes.get(kind, 0), tensor_bytes(tensors))


class DeviceMemoryTrace:
    """Samples the bytes that the accelerator holds while its block runs.

        with DeviceMemoryTrace() as trace:
            trainer.train()
        plt.plot(trace.seconds, trace.device_bytes)

    A background thread samples every `interval_s` seconds and may miss shorter peaks; `peak_bytes` comes from the
    device's own counter and misses none.

    Raises:
        ValueError: if there is no accelerator.
    """

    def __init__(self, interval_s: float = 0.002) -> None:
        if not torch.accelerator.is_available():
            raise ValueError(
                "device memory can be traced on an accelerator only (there is none); call "
                "hf_l2l.testing.enable_simulated_accelerator() at the top of the script"
            )
        self.interval_s = interval_s
        self.seconds: list[float] = []
        """Time of each sample since the start of the block."""
        self.device_bytes: list[int] = []
        """Bytes on the device at each sample."""
        self.peak_bytes = 0
        """Peak bytes on the device."""

    def __enter__(self) -> Self:
        self.seconds, self.device_bytes, self.peak_bytes = [], [], 0
        torch.accelerator.reset_peak_memory_stats()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="l2l-memory-trace", daemon=True)
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak_bytes = torch.accelerator.max_memory_allocated()

    def _sample(self) -> None:
        while True:
            self.seconds.append(time.perf_counter() - self._start)
            self.device_bytes.append(torch.accelerator.memory_allocated())
            if self._stop.wait(self.interval_s):
                return
