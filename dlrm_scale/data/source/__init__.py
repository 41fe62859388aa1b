"""Raw input, a text, .npy or Parquet file, to blocks of checked columns."""
