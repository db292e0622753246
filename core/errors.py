"""The errors of kvstrata.

    KVStrataError             everything we raise on purpose; its text says in one line what to do
      MisuseError             a call that can never be right (also a ValueError)
        ConfigError           a setting that is unknown, ill-typed or impossible
        LayoutError           tensors that contradict the given KVModel, block ids out of range
      FingerprintError        bytes of another format version or model where ours must be
      DirectoryBusyError      the NVMe directory belongs to another Store
      StorageError            a directory that cannot be used at all, at open
      DeviceLostError         a device or rank that will not answer again
      ClosedError             a call on something that has been closed (also a ValueError)

A miss, a full tier and a damaged record are not here: they are answers, and the caller recomputes.
"""


class KVStrataError(Exception):
    """Base of every error that kvstrata raises on purpose."""


class MisuseError(KVStrataError, ValueError):
    """The call can never be right: fix the caller."""


class ConfigError(MisuseError):
    """A setting is unknown, has the wrong type, or is impossible."""


class LayoutError(MisuseError):
    """Tensors contradict the KVModel, or a block id lies outside of its pool."""


class FingerprintError(KVStrataError):
    """Stored bytes are of another format version or another model."""


class DirectoryBusyError(KVStrataError):
    """Another Store holds the NVMe directory."""


class StorageError(KVStrataError):
    """The NVMe directory cannot be used at all."""


class DeviceLostError(KVStrataError):
    """A device or a rank that holds bytes will not answer again."""


class ClosedError(KVStrataError, ValueError):
    """The object has been closed."""
