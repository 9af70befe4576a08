//! The project itself: its pages, packages, installation, updates, and the lab.

automod::dir!(pub "tests/lab/project");
