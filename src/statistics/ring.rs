//! A list of the latest entries, in memory that all sessions of a database share.
//!
//! One word of that memory is a spin lock, held while one entry is copied in or all are copied out. A session that
//! finds it busy for too long gives up, so a process stopped while holding it blocks nobody.

use pg_fence_rules::shares::{Entry, next_to_evict};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The number of words of an entry: its number, its owner and length, and its bytes.
pub const CELL_WORDS: usize = 128;
/// The longest entry, in bytes.
pub const ENTRY_MAX: usize = (CELL_WORDS - HEAD) * 8;

const HEAD: usize = 2;
/// The number of attempts to take the lock, and the sleep between them.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_micros(10);

/// A ring in shared words, which are all zero at first.
#[derive(Clone, Copy)]
pub struct Ring<'a> {
    /// The spin lock; 0 if it is free.
    pub lock: &'a AtomicU64,
    /// The number of entries ever added.
    pub count: &'a AtomicU64,
    /// `CELL_WORDS` words for each entry of the ring.
    pub cells: &'a [AtomicU64],
}

impl Ring<'_> {
    /// Adds an entry of this owner, of at most `ENTRY_MAX` bytes.
    pub fn put(&self, owner: u32, entry: &[u8]) {
        self.under_lock(|| {
            let kept = self.cells().map(|cell| {
                let owner = (load(&cell[1]) >> 32) as u32;
                Some(Entry { number: load(&cell[0]), owner }).filter(|entry| entry.number > 0)
            });
            let Some(place) = next_to_evict(&kept.collect::<Vec<_>>()) else { return };
            let cell = &self.cells[place * CELL_WORDS..(place + 1) * CELL_WORDS];
            let number = load(self.count) + 1;
            self.count.store(number, Ordering::Relaxed);
            cell[0].store(number, Ordering::Relaxed);
            cell[1].store(u64::from(owner) << 32 | entry.len() as u64, Ordering::Relaxed);
            for (word, bytes) in cell[HEAD..].iter().zip(entry.chunks(8)) {
                let mut padded = [0; 8];
                padded[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
            }
        });
    }

    /// The stored entries, newest first.
    pub fn entries(&self) -> Vec<Vec<u8>> {
        let copies = self.under_lock(|| {
            let kept = self.cells().filter(|cell| load(&cell[0]) > 0);
            kept.map(|cell| (load(&cell[0]), copy(cell))).collect::<Vec<_>>()
        });
        let mut copies = copies.unwrap_or_default();
        copies.sort_unstable_by_key(|(number, _)| std::cmp::Reverse(*number));
        copies.into_iter().map(|(_, entry)| entry).collect()
    }

    /// Deletes all entries.
    pub fn clear(&self) {
        self.under_lock(|| self.cells().for_each(|cell| cell[0].store(0, Ordering::Relaxed)));
    }

    fn cells(&self) -> impl Iterator<Item = &[AtomicU64]> {
        self.cells.chunks_exact(CELL_WORDS)
    }

    /// Runs `work` under the spin lock; `None` if it is busy.
    fn under_lock<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let take =
            || self.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
            }
            if take() {
                let done = work();
                self.lock.store(0, Ordering::Release);
                return Some(done);
            }
        }
        None
    }
}

fn load(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

fn copy(cell: &[AtomicU64]) -> Vec<u8> {
    let length = (load(&cell[1]) as u32 as usize).min(ENTRY_MAX);
    let mut bytes: Vec<u8> =
        cell[HEAD..].iter().flat_map(|word| load(word).to_le_bytes()).collect();
    bytes.truncate(length);
    bytes
}
