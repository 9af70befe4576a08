//! The project itself: its pages, packages, installation and updates, and its tests.

automod::dir!(pub "tests/suite/project");
