//! A clock for servers that can be stepped, by a small library that is loaded before the C library.

use crate::cluster::Builder;
use crate::process::output_of;
use anyhow::{Context, Result};
use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A clock for servers that can be stepped.
pub struct Clock {
    /// The first eight bytes of the file are the offset in seconds.
    file: PathBuf,
    library: PathBuf,
}

impl Clock {
    /// A clock that is right at first, with its state in `file` and the library beside it.
    pub fn new(file: &Path) -> Result<Clock> {
        let source = file.with_extension("c");
        std::fs::write(&source, include_str!("clock/stepped.c"))?;
        let library = file.with_extension("so");
        output_of(
            Command::new("cc").args(["-shared", "-fPIC", "-O2", "-o"]).args([&library, &source]),
        )?;
        // The file is not truncated: a running server that uses it would die if the file ended before its page.
        let fresh = OpenOptions::new().write(true).create(true).truncate(false).open(file)?;
        fresh.write_all_at(&0i64.to_ne_bytes(), 0)?;
        for (path, mode) in [(file, 0o644), (&*library, 0o755)] {
            std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        }
        Ok(Clock { file: file.to_owned(), library })
    }

    /// Makes a server use the clock.
    pub fn give(&self, builder: Builder) -> Builder {
        builder
            .env("LD_PRELOAD", &self.library.to_string_lossy())
            .env("STEPPED_CLOCK", &self.file.to_string_lossy())
    }

    /// Steps the clock to this number of seconds from the right time.
    pub fn step(&self, seconds: i64) -> Result<()> {
        let file = OpenOptions::new().write(true).open(&self.file);
        file.and_then(|file| file.write_all_at(&seconds.to_ne_bytes(), 0))
            .with_context(|| format!("cannot step {}", self.file.display()))
    }
}
