//! Detects stalls of the machine: a shared machine stalls now and then, and so does its disk.

use anyhow::Result;
use std::fs::File;
use std::io::{Seek, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the watching thread sleeps between two checks of the clock.
const PAUSE: Duration = Duration::from_millis(20);

/// Writes to disk every N checks.
const LOOKS_PER_WRITE: u32 = 5;

/// A failure is tried again if the machine stalled for at least that long.
const LONG_STALL: Duration = Duration::from_millis(100);

/// How many times slower each attempt is than the first.
const PACES: [u32; 3] = [1, 2, 4];

/// Runs a test. If it fails and the machine stalled meanwhile, runs it again more slowly: such a failure shows nothing.
/// A fault shows at every pace, and the last attempt's result counts in any case. `directory` is on the disk that is
/// watched.
pub fn at_some_pace(
    directory: &Path,
    what: &str,
    attempt: impl Fn(u32) -> Result<()>,
) -> Result<()> {
    let [others @ .., last] = PACES;
    for pace in others {
        let watch = Watch::start(directory)?;
        let Err(error) = attempt(pace) else { return Ok(()) };
        let stood_still = watch.longest();
        if stood_still < LONG_STALL {
            return Err(error);
        }
        eprintln!(
            "{what}: the machine stood still for {stood_still:?}: again, more slowly ({error:#})"
        );
    }
    attempt(last)
}

/// Checks the clock repeatedly until it is dropped. Whatever delays a check delays the other processes, too.
struct Watch(Arc<Mutex<Seen>>);

struct Seen {
    last_look: Instant,
    longest: Duration,
}

impl Watch {
    /// Watches the machine, and the disk of this directory.
    fn start(directory: &Path) -> Result<Watch> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("watch-{number}"));
        let mut file = File::create(&path)?;
        std::fs::remove_file(&path)?;
        let seen = Seen { last_look: Instant::now(), longest: Duration::ZERO };
        let seen = Arc::new(Mutex::new(seen));
        let watched = Arc::downgrade(&seen);
        std::thread::Builder::new().name("watch".to_owned()).spawn(move || {
            for look in 0_u32.. {
                std::thread::sleep(PAUSE);
                if look % LOOKS_PER_WRITE == 0 && write(&mut file).is_err() {
                    return;
                }
                let Some(seen) = watched.upgrade() else { return };
                locked(&seen).look();
            }
        })?;
        Ok(Watch(seen))
    }

    /// Returns the longest stall of the machine or its disk since the start.
    fn longest(&self) -> Duration {
        // The thread itself may not have seen a stall that has just ended.
        let mut seen = locked(&self.0);
        seen.look();
        seen.longest
    }
}

impl Seen {
    fn look(&mut self) {
        let late = self.last_look.elapsed().saturating_sub(PAUSE);
        self.longest = self.longest.max(late);
        self.last_look = Instant::now();
    }
}

fn locked(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes and flushes as a server's commit does.
fn write(file: &mut File) -> Result<()> {
    file.rewind()?;
    file.write_all(b"written")?;
    file.sync_data()?;
    Ok(())
}
