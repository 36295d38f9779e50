"""Bytes on disk: JSON, safetensors, states of interrupted runs, locks and checks of directory entries.

Everything is read with full validation, and written whole or not at all. Nothing here knows what a model is: no room of
`engine` is imported. Start with `safetensors_file.py` (reading) and `safetensors_writer.py` (writing).
"""
