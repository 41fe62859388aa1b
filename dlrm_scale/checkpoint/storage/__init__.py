"""Where a checkpoint's files lie: a local folder or an object store."""
