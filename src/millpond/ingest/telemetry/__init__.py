"""What a run counts: its progress, its trace and its report."""
