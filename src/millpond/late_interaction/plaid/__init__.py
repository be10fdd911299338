"""PlaidIndex: token matrices on disk, in immutable segments that are mapped into memory."""
