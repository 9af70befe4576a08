//! A clock of servers that can be stepped, by a small library that is loaded before the C library.

use crate::cluster::Builder;
use crate::process::output_of;
use anyhow::{Context, Result};
use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A clock that servers believe in, and that can be stepped.
pub struct Clock {
    /// Its first eight bytes say by how many seconds it is off.
    file: PathBuf,
    library: PathBuf,
}

impl Clock {
    /// A clock that is right for now, kept in `file`, with the library beside it.
    pub fn new(file: &Path) -> Result<Clock> {
        let source = file.with_extension("c");
        std::fs::write(&source, include_str!("clock/stepped.c"))?;
        let library = file.with_extension("so");
        output_of(
            Command::new("cc").args(["-shared", "-fPIC", "-O2", "-o"]).args([&library, &source]),
        )?;
        // Not truncated: a server that still runs by it would die of a file that ends before its page.
        let fresh = OpenOptions::new().write(true).create(true).truncate(false).open(file)?;
        fresh.write_all_at(&0i64.to_ne_bytes(), 0)?;
        for (path, mode) in [(file, 0o644), (&*library, 0o755)] {
            std::fs::set_permissions(path, Permissions::from_mode(mode))?;
        }
        Ok(Clock { file: file.to_owned(), library })
    }

    /// Makes a server believe in it.
    pub fn give(&self, builder: Builder) -> Builder {
        builder
            .env("LD_PRELOAD", &self.library.to_string_lossy())
            .env("STEPPED_CLOCK", &self.file.to_string_lossy())
    }

    /// Steps it to so many seconds from the right time.
    pub fn step(&self, seconds: i64) -> Result<()> {
        let file = OpenOptions::new().write(true).open(&self.file);
        file.and_then(|file| file.write_all_at(&seconds.to_ne_bytes(), 0))
            .with_context(|| format!("cannot step {}", self.file.display()))
    }
}
