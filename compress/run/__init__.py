"""What every job starts from and ends with: options, checked inputs, work directory, figures, result.

What a job does in between stays in its own file. Start with `job.py`.
"""
