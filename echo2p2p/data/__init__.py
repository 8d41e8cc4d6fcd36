"""The data plane: tasks, trajectories, and what worker and learner say to each other."""
