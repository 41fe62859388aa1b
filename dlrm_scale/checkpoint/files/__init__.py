"""What a checkpoint's files hold: names, manifests, data files, codecs."""
