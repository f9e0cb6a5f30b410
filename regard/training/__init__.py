"""How models learn: tasks and losses, the step and the loop, the run and its folder."""
