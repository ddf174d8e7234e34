"""Playing problems in other processes, so that a crash or a hang ends one problem and not the run.

    driver (this process)                     worker (conformance.workers.player)
    Hypothesis draws  -- Task as text -->     loads the implementation once, plays one problem after the other
    verdict           <-- Played --------     all ranks are threads of a simulated group

An implementation with `group_kind = "process"` gets a pool of workers instead, one for each rank, with a
torch.distributed group between them:

    driver            -- Task to all --->     rank 0, rank 1, ...: each plays its own rank, judges the same
                      <-- outcome -------     at every `run_ranks` each rank says what it got ...
                      -- all outcomes -->     ... and learns what the others got

Every word between ranks about the problem goes through the driver, so it knows at any time which rank it waits for.

isolated    the runner of one process: `IsolatedRunner`
pool        the runner of a process for each rank: `ProcessRunner`
remote      what both are: `RemotePlayer`
worker      the driver's end of one worker process
nursery     the driver's end of the process that workers are forked from
player      the worker's end
ranks       the worker's end of a group of processes
"""

from conformance.workers.isolated import IsolatedRunner
from conformance.workers.pool import ProcessRunner, start_runner
from conformance.workers.remote import RemotePlayer

__all__ = ["IsolatedRunner", "ProcessRunner", "RemotePlayer", "start_runner"]
