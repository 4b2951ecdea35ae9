"""Records of finished runs: tables, report, export."""
