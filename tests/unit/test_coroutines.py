"""Functions in coroutines of their own: who goes on when, what each has set, and how they end."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_l2l.engine.coroutines import Coroutines

CPU = torch.device("cpu")
NAME = contextvars.ContextVar("name", default="")


def visits(*paths: str) -> str:
    """Who comes where, of functions that wait for these letters one after the other."""
    coroutines: Coroutines[None] = Coroutines(CPU)
    found: list[str] = []

    def walk(number: int) -> Callable[[], None]:
        def run() -> None:
            for letter in paths[number]:
                coroutines.wait_for(letter)
                found.append(f"{letter}{number}")

        return run

    coroutines.run([walk(number) for number in range(len(paths))])
    return " ".join(found)


def test_those_that_wait_for_the_same_come_one_after_the_other_the_last_one_first():
    assert visits("abc", "abc") == "a1 a0 b1 b0 c1 c0"
    assert visits("ab") == "a0 b0"


def test_calls_that_differ_wait_for_nobody_for_ever():
    assert visits("abd", "acd", "d") == "d2 a1 a0 c1 b0 d1 d0"
    assert visits("aab", "ab", "") == "a1 a0 a0 b1 b0"
    assert visits("ab", "ba").count("a") == 2


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def settings() -> tuple[object, ...]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        hooks is not None,
        NAME.get(),
    )


def test_what_one_sets_is_set_for_it_alone_though_blocks_do_not_nest():
    coroutines: Coroutines[tuple[object, ...]] = Coroutines(CPU)
    before = settings()

    def with_all() -> tuple[object, ...]:
        NAME.set("own")
        with (
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16),
            Functions(),
            Dispatch(),
            torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        ):
            inside = settings()
            for _ in range(2):
                coroutines.wait_for("a layer")
                assert settings() == inside
        assert settings() == (*before[:-1], "own")
        return inside

    def plain() -> tuple[object, ...]:
        for _ in range(3):
            coroutines.wait_for("a layer")
            assert settings() == before
        return settings()

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        outer = settings()
        coroutines.run([lambda: coroutines.wait_for("a layer") or settings()])
        assert settings() == outer
    inside, kept = coroutines.run([with_all, plain])
    assert inside != before == kept == settings()


def test_a_weight_that_autocast_has_cast_serves_one_of_them():
    coroutines: Coroutines[torch.Tensor] = Coroutines(CPU)
    weight = torch.ones(2, 2, requires_grad=True)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            coroutines.wait_for("a layer")
            return torch.ones(2, 2) @ weight

    one, other = (result.grad_fn.next_functions[1][0] for result in coroutines.run([run, run]))
    assert one is not None and one is not other


def test_an_error_ends_all_in_their_own_settings_and_comes_out():
    coroutines: Coroutines[None] = Coroutines(CPU)
    ended: list[object] = []

    def waits() -> None:
        with torch.no_grad():
            try:
                coroutines.wait_for("a layer")
            finally:
                ended.append(torch.is_grad_enabled())
                coroutines.wait_for("once more")

    def fails() -> None:
        coroutines.wait_for("a layer")
        raise KeyboardInterrupt("now")

    with torch.enable_grad(), pytest.raises(KeyboardInterrupt, match="now"):
        coroutines.run([waits, fails, waits])
    assert ended == [False, False] and torch.is_grad_enabled()
    assert coroutines.run([lambda: None]) == [None]


def test_a_backward_visits_the_first_function_first():
    coroutines: Coroutines[torch.Tensor] = Coroutines(CPU)
    order: list[str] = []

    def forward(number: int) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            x = torch.ones(1, requires_grad=True)
            for layer in range(3):
                coroutines.wait_for(layer)
                x = x * 2
                x.register_hook(lambda gradient, layer=layer: order.append(f"{layer}{number}"))
            return x

        return run

    sum(coroutines.run([forward(number) for number in range(2)])).backward()
    assert order == ["20", "21", "10", "11", "00", "01"]
