"""Functions and modules run on a container, here or in other processes; not what these do."""
