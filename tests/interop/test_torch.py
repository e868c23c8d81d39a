"""torch: checkpoints, safetensors, and data loaders whose workers are processes."""

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint(url):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 16))
    state = {"model": model.state_dict(), "step": torch.tensor(7)}
    dcp.save(state, storage_writer=FsspecWriter(f"{url}/checkpoint"), no_dist=True)
    fresh = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "step": torch.tensor(0),
    }
    dcp.load(fresh, storage_reader=FsspecReader(f"{url}/checkpoint"), no_dist=True)
    assert int(fresh["step"]) == 7
    for name, value in state["model"].items():
        assert torch.equal(fresh["model"][name], value)


def test_torch_save_and_load(fs):
    tensors = {"a": torch.arange(100_000), "b": torch.randn(3, 5)}
    with fs.open("tensors.pt", "wb") as file:
        torch.save(tensors, file)
    with fs.open("tensors.pt", "rb") as file:
        back = torch.load(file, weights_only=True)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_safetensors(fs):
    safetensors = pytest.importorskip("safetensors.torch", reason="make test-interop has it")
    tensors = {"weight": torch.randn(512, 512), "bias": torch.randn(512)}
    fs.pipe_file("model.safetensors", safetensors.save(tensors))
    back = safetensors.load(fs.cat_file("model.safetensors"))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


class Files(torch.utils.data.Dataset):
    """A thousand files, read by whoever is asked."""

    def __init__(self, fs, count):
        self.fs = fs
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        return int.from_bytes(self.fs.cat_file(f"items/{at}")[:8], "little")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loaders_with_worker_processes(fs, method):
    count = 1000
    fs.pipe({f"items/{at}": at.to_bytes(8, "little") * 500 for at in range(count)})
    loader = torch.utils.data.DataLoader(
        Files(fs, count), batch_size=50, num_workers=4, multiprocessing_context=method, timeout=100
    )
    assert sorted(int(value) for batch in loader for value in batch) == list(range(count))
    assert fs.cat_file("items/3")[:8] == (3).to_bytes(8, "little")
