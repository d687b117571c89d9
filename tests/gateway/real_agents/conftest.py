"""What agents run is not ours to import: it needs their environments."""

collect_ignore_glob = ["run_*.py", "confined/*"]
