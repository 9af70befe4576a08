//! The latest entries, in memory that all sessions of a database share.
//!
//! A word of that memory is its lock, which a session has for as long as it copies an entry in, or all of them out. A
//! session that finds it taken for too long does without: one that was stopped just then keeps nobody up.

use pg_fence_rules::shares::{next_to_go, Entry};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How many words an entry takes: its number; its owner and length; its bytes.
pub const CELL_WORDS: usize = 128;
/// The most bytes that an entry can have.
pub const ENTRY_MAX: usize = (CELL_WORDS - HEAD) * 8;

const HEAD: usize = 2;
/// How often to ask for the lock, and how long to sleep in between.
const LOOKS: u32 = 100;
const BETWEEN_LOOKS: Duration = Duration::from_micros(10);

/// A ring over shared words, which are all zero at first.
#[derive(Clone, Copy)]
pub struct Ring<'a> {
    /// 0 where it is free.
    pub lock: &'a AtomicU64,
    /// How many entries there have been.
    pub count: &'a AtomicU64,
    /// `CELL_WORDS` for each entry that is kept.
    pub cells: &'a [AtomicU64],
}

impl Ring<'_> {
    /// Adds an entry of this owner, of `ENTRY_MAX` bytes at most.
    pub fn put(&self, owner: u32, entry: &[u8]) {
        self.alone(|| {
            let kept = self.cells().map(|cell| {
                let owner = (load(&cell[1]) >> 32) as u32;
                Some(Entry { number: load(&cell[0]), owner }).filter(|entry| entry.number > 0)
            });
            let Some(place) = next_to_go(&kept.collect::<Vec<_>>()) else { return };
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

    /// The entries that are there, newest first.
    pub fn entries(&self) -> Vec<Vec<u8>> {
        let copies = self.alone(|| {
            let kept = self.cells().filter(|cell| load(&cell[0]) > 0);
            kept.map(|cell| (load(&cell[0]), copy(cell))).collect::<Vec<_>>()
        });
        let mut copies = copies.unwrap_or_default();
        copies.sort_unstable_by_key(|(number, _)| std::cmp::Reverse(*number));
        copies.into_iter().map(|(_, entry)| entry).collect()
    }

    /// Forgets all entries.
    pub fn clear(&self) {
        self.alone(|| self.cells().for_each(|cell| cell[0].store(0, Ordering::Relaxed)));
    }

    fn cells(&self) -> impl Iterator<Item = &[AtomicU64]> {
        self.cells.chunks_exact(CELL_WORDS)
    }

    /// Does work under the lock; None where it is not to be had.
    fn alone<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let take =
            || self.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        for look in 0..LOOKS {
            if look > 0 {
                std::thread::sleep(BETWEEN_LOOKS);
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
