"""The doctor: every check of the project, run on a model or on any module, and what they found."""
