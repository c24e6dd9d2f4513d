"""The cluster as the training script sees it: who is here, and workers on other machines as if they were local."""
