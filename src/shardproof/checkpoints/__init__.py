"""A run's state on disk: saved beside training, resumed by any layout."""
