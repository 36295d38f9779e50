"""Bytes on disk: JSON, safetensors, images, states of interrupted runs, locks and checks of directory entries.

Everything is read with full validation, and written completely or not at all. Nothing here knows models: no other room of
`engine` is imported. Start with `safetensors_file.py` (reading) and `safetensors_writer.py` (writing).
"""
