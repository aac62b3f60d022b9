"""The doctor: every check of the project, run on a model or on anyone's module, and what they found."""
