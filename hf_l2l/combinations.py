"""Options that contradict each other."""

from __future__ import annotations

from typing import Any

from hf_l2l.option_names import option

EAGER_FP16 = (
    "eps_update='eager' updates layers before it is known whether a gradient of another one overflows in fp16 (got "
    "cmp with fp16); use eps_update='deferred', which knows and gives the same bits as 'serial', or cmp='bf16'"
)


def check_together(config: Any) -> None:
    """Raise ValueError if options of an `L2LConfig` contradict each other."""
    if config.cmp == "fp16" and config.eps_update == "eager":
        raise ValueError(EAGER_FP16)
    if config.nonfinite == "skip" and config.eps_update == "eager":
        raise ValueError(
            "eps_update='eager' updates layers before it is known whether the gradients of others are finite, so "
            f"no step can be skipped (got {option('nonfinite')}='skip'); use eps_update='deferred', or "
            f"{option('nonfinite')}='raise'"
        )
    if config.boundary == "host" and config.stash == "device":
        raise ValueError(
            f"{option('boundary')}='host' passes what is in the stash from layer to layer, so it needs "
            f"stash='host', 'disk' or 'auto' (got stash={config.stash!r}); set stash='host', or leave "
            f"{option('boundary')} out"
        )
    if config.spill_dir is not None and config.stash not in ("disk", "auto"):
        raise ValueError(
            f"{option('spill_dir')} is for layer inputs on disk, so it needs stash='disk' or 'auto' (got "
            f"{option('spill_dir')}={config.spill_dir!r} with stash={config.stash!r}); set stash='disk', or leave "
            f"{option('spill_dir')} out"
        )
    if config.device_stash and config.stash == "device":
        raise ValueError(
            f"{option('device_stash')} is for layers whose inputs stay on the device while those of others leave "
            f"(got {option('device_stash')}={config.device_stash} with stash='device', where all stay); set "
            f"stash='host', or leave {option('device_stash')} out"
        )
    if config.resident_update == "host" and config.resident == "none" and not config.resident_layers:
        raise ValueError(
            f"{option('resident_update')} is for resident weights (got 'host' with {option('resident')}='none'); "
            f"set {option('resident')} or {option('resident_layers')}, or leave it out"
        )
    if config.resident == "all" and config.resident_layers:
        raise ValueError(
            f"{option('resident')}='all' has all layers (got {option('resident_layers')}={config.resident_layers} "
            f"with it); leave {option('resident_layers')} out, or use {option('resident')}='shell'"
        )
    if config.host_copies == "per_sweep" and config.cmp is None:
        raise ValueError(
            f"{option('host_copies')} is about the 16-bit copies of cmp (got {option('host_copies')}='per_sweep' "
            "with cmp=None, where the masters themselves travel); leave it out, or set cmp"
        )
    if config.state_tier == "disk" and config.resident == "all":
        raise ValueError(
            f"{option('state_tier')}='disk' is for masters that are on the host (got {option('resident')}='all', with "
            "which all are on the device); leave out one"
        )
    for name, usual in (("state_dir", None), ("state_window", 4)):
        value = getattr(config, name)
        if value != usual and config.state_tier == "host":
            raise ValueError(
                f"{option(name)} is for state on disk, so it needs {option('state_tier')}='disk' (got "
                f"{option(name)}={value!r} with {option('state_tier')}='host'); set {option('state_tier')}='disk', or "
                f"leave {option(name)} out"
            )
