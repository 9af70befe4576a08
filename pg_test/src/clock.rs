//! A server whose clock can be stepped, by libfaketime.

use crate::cluster::{Builder, Cluster};
use crate::setup::{self, Package};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A clock that servers believe in, and that can be stepped.
pub struct Clock {
    file: PathBuf,
    library: PathBuf,
}

impl Clock {
    /// A clock that is right for now, kept in `file`.
    pub fn new(file: &Path) -> Result<Clock> {
        setup::ensure(&[package()])?;
        let library =
            library().context("libfaketime is installed, and its library is not there")?;
        let clock = Clock { file: file.to_owned(), library };
        clock.step(0)?;
        Ok(clock)
    }

    /// Makes a server believe in it.
    pub fn give(&self, builder: Builder) -> Builder {
        builder
            .env("LD_PRELOAD", &self.library.to_string_lossy())
            .env("FAKETIME_TIMESTAMP_FILE", &self.file.to_string_lossy())
            .env("FAKETIME_NO_CACHE", "1")
            // Timeouts go on by the clock that nobody can step, as on a real machine.
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1")
    }

    /// Steps it to so many seconds from the right time.
    pub fn step(&self, seconds: i64) -> Result<()> {
        // Replaced as a whole: a server that looks meanwhile sees the old or the new one.
        let fresh = self.file.with_extension("new");
        fs::write(&fresh, format!("{seconds:+}\n"))?;
        fs::rename(&fresh, &self.file)?;
        Ok(())
    }
}

/// A server with a clock of its own.
pub struct Clocked {
    cluster: Cluster,
    clock: Clock,
}

/// The package that it needs.
pub fn package() -> Package {
    Package::new("libfaketime", "/usr/lib/*-linux-gnu/faketime/libfaketime.so.1")
}

impl Clocked {
    /// Starts a server whose clock is right for now.
    pub fn start(builder: Builder, dir: &Path) -> Result<Clocked> {
        let clock = Clock::new(&dir.join("clock"))?;
        let cluster = clock.give(builder).start()?;
        Ok(Clocked { cluster, clock })
    }

    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Steps the clock to so many seconds from the right time.
    pub fn step(&self, seconds: i64) -> Result<()> {
        self.clock.step(seconds)
    }
}

fn library() -> Option<PathBuf> {
    let lib = fs::read_dir("/usr/lib").ok()?;
    let places = lib.flatten().map(|entry| entry.path().join("faketime/libfaketime.so.1"));
    places.into_iter().find(|path| path.exists())
}
