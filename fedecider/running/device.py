"""The device that somebody names."""

from __future__ import annotations

import torch


def checked_device(name: str | torch.device) -> torch.device:
    """The device called ``name``.

    Raises:
        ValueError: there is no such kind of device, or this machine has none.
    """
    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"got device {str(name)!r}, expected one of {', '.join(found)}") from error
    wanted = f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
    if wanted not in found:
        raise ValueError(
            f"got device {str(name)!r}, which this machine does not have, expected one of {', '.join(found)}"
        )
    return device
