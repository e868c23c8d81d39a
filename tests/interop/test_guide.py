"""The guide to data libraries: its blocks run here, one after the other, on a real pool."""

import re
import runpy
from pathlib import Path

import pytest

for _library in ("pandas", "pyarrow", "duckdb", "zarr", "dask", "torch", "safetensors"):
    pytest.importorskip(_library, reason="make test-interop has it")

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "data-libraries.md"
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_guide_runs(url, tmp_path):
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == 6
    script = tmp_path / "guide.py"
    script.write_text("".join(blocks).replace("mooncake://10.0.0.5:50051/default", url))
    runpy.run_path(str(script))
