"""Tables: pandas, pyarrow, dask and DuckDB read and write the store by its URLs."""

import numpy as np
import pytest

pd = pytest.importorskip("pandas", reason="make test-interop has it")
pa = pytest.importorskip("pyarrow", reason="make test-interop has it")


@pytest.fixture
def frame():
    generator = np.random.default_rng(7)
    return pd.DataFrame(
        {
            "number": np.arange(50_000),
            "value": generator.standard_normal(50_000),
            "text": [f"row {n % 97}" for n in range(50_000)],
        }
    )


def test_pandas_parquet_and_csv(url, frame):
    frame.to_parquet(f"{url}/table.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(f"{url}/table.parquet"), frame)
    columns = pd.read_parquet(f"{url}/table.parquet", columns=["value"])
    pd.testing.assert_frame_equal(columns, frame[["value"]])
    frame.head(1000).to_csv(f"{url}/table.csv.gz", index=False)
    pd.testing.assert_frame_equal(pd.read_csv(f"{url}/table.csv.gz"), frame.head(1000))


def test_a_partitioned_pyarrow_dataset(fs, frame):
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame.assign(group=frame["number"] % 5))
    pq.write_to_dataset(table, "data/set", partition_cols=["group"], filesystem=fs)
    found = ds.dataset("data/set", filesystem=fs, partitioning="hive")
    assert found.count_rows() == len(frame)
    group = found.to_table(filter=ds.field("group") == 3).to_pandas()
    assert set(group["number"] % 5) == {3}


def test_duckdb_queries_through_fsspec(fs, url, frame):
    duckdb = pytest.importorskip("duckdb")
    frame.to_parquet(f"{url}/table.parquet")
    connection = duckdb.connect()
    connection.register_filesystem(fs)
    query = f"select count(*), sum(number) from read_parquet('{url}/table.parquet')"
    assert connection.execute(query).fetchone() == (len(frame), int(frame["number"].sum()))
    connection.close()


def test_dask_reads_and_writes_in_threads(url):
    array = pytest.importorskip("dask.array")
    pytest.importorskip("zarr")
    data = array.arange(100_000, chunks=10_000)
    array.to_zarr(data, f"{url}/array.zarr")
    back = array.from_zarr(f"{url}/array.zarr")
    assert int(back.sum().compute()) == 100_000 * 99_999 // 2
