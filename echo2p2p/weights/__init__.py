"""How a policy version travels from the learner to every worker."""
