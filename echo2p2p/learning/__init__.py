"""The learning plane: admission, the window, GRPO, and the learner."""
