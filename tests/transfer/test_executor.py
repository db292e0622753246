from __future__ import annotations

from kvstrata.transfer.executor import LocalExecutor
from kvstrata.transfer.move import Executor


def test_is_an_executor_of_one_rank(house) -> None:
    one = house()
    executor: Executor = LocalExecutor(one.engine)
    assert executor.num_ranks == 1
    executor.submit([one.move("hbm", "dram", [0], [0])])
    executor.submit([one.move("dram", "hbm", [1], [1], gate=2)])
    assert isinstance(executor, LocalExecutor)
    assert executor.gate(2, 0).wait(2, 60)
    executor.close()
    assert len(executor.poll()) == 2 and not executor.poll()
