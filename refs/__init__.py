"""Reference training scripts: each file is read, run and copied on its own."""
