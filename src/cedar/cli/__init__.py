"""The `cedar` command: one file per verb. stdout is for results, stderr for logs and progress."""
