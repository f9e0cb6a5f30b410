"""How models learn: what is minimised and how the step is taken."""
