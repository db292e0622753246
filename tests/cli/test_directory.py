"""`inspect` and `verify` on a directory that a real Store has written."""

import json
from pathlib import Path

import pytest

import kvstrata
from kvstrata.cli import main
from kvstrata.core.config import DramConfig, NvmeConfig, Size
from kvstrata.testing.models import tiny_model
from kvstrata.tiers.hbm import HbmTier

BLOCKS = 8


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Eight blocks of the tiny model, in a directory that nobody has open any more."""
    path = tmp_path / "nvme"
    config = kvstrata.StoreConfig(
        dram=DramConfig(capacity=Size(8 << 20), chunk=Size(1 << 20)),
        nvme=NvmeConfig(path=str(path), quota=Size(512 << 20), extent=Size(1 << 20)),
    )
    model = tiny_model()
    hbm = HbmTier.allocate(model, BLOCKS, "cpu")
    for number, tensor in enumerate(hbm.tensors(0)):
        tensor.fill_(number + 1)
    with kvstrata.open_store(config, model, hbm=hbm) as store:
        prefix = kvstrata.Prefix.from_tokens(range(BLOCKS * model.block_size))
        assert store.wait(store.save(prefix, {0: list(range(BLOCKS))}), 60) is not None
    return path


def damage(directory: Path) -> None:
    """Flips a byte in every page of the extents."""
    for extent in (directory / "extents").iterdir():
        data = bytearray(extent.read_bytes())
        for at in range(100, len(data), 4096):
            data[at] ^= 1
        extent.write_bytes(data)


def test_inspect(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["records"] == BLOCKS and found["bytes"] > 0
    assert {"namespaces", "epochs", "groups"} <= found.keys()
    assert main(["inspect", str(directory)]) == 0
    assert "records" in capsys.readouterr().out


def test_verify_and_repair(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verify(*flags: str) -> tuple[int, dict[str, int]]:
        code = main(["verify", str(directory), "--json", *flags])
        return code, json.loads(capsys.readouterr().out)

    code, found = verify()
    assert code == 0 and found["records"] == found["ok"] == BLOCKS and found["corrupt"] == 0
    damage(directory)
    code, found = verify()
    assert code == 1 and found["corrupt"] == found["records"] == BLOCKS
    assert main(["verify", str(directory)]) == 1
    assert "--repair" in capsys.readouterr().out
    assert verify("--repair")[0] == 0
    code, found = verify()
    assert code == 0 and found["records"] == found["corrupt"] == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_not_a_directory_of_ours(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path / "nowhere", tmp_path, file, file / "below"):
        assert main([command, str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("kvstrata: ") and err.count("\n") == 1
        assert str(path) in err
