"""What this machine has to offer: the first guess of a worker's advert."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inventory:
    """``gpu`` is the driver's name for it, or CPU; ``memory_gib`` of one GPU, or of the machine."""

    gpu: str
    gpu_count: int
    memory_gib: float


def look() -> Inventory:
    """Ask NVIDIA's driver; without one, describe the machine itself."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return _cpu()
    except pynvml.NVMLError:
        return _cpu()
    try:
        count = pynvml.nvmlDeviceGetCount()
        if count == 0:
            return _cpu()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory_gib = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
        return Inventory(str(pynvml.nvmlDeviceGetName(handle)), count, round(memory_gib, 1))
    except pynvml.NVMLError:
        return _cpu()
    finally:
        pynvml.nvmlShutdown()


def _cpu() -> Inventory:
    import psutil

    return Inventory("CPU", 0, round(psutil.virtual_memory().total / 2**30, 1))
