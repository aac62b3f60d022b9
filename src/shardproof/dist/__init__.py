"""Process groups, meshes and every collective the project issues."""
