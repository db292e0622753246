"""The NVMe tier: LMDB is the catalogue, extent files hold the bytes."""
