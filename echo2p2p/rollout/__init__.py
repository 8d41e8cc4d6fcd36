"""The rollout plane: the worker and its inference engine."""
