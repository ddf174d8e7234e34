"""The whole training step, over ranks and in one process: what is wrong around attention.

    from conformance.step import compare_step

    def build(cp):            # cp: None for one process, else a cp_fast.ContextParallel; called once per rank
        model = ...
        def step(batch):      # the user's own code: cuts the batch, computes the loss, reduces gradients
            ...
            return loss
        return model, step    # or (model, step, optimizer)

    print(compare_step(build, batch, cp_size=4))

docs/how_to/training.md has the mistakes that it knows by name.
"""

from conformance.step.compare_step import compare_step
from conformance.step.report import CAUSES, Finding, StepReport
from conformance.step.step_record import StepError

__all__ = ["CAUSES", "Finding", "StepError", "StepReport", "compare_step"]
