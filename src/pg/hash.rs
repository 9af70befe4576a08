//! A quick hash for tables of this session's own, whose keys nobody else can choose.

use std::hash::{BuildHasherDefault, Hasher};

/// Makes the hashes of a `HashMap`.
pub type Quick = BuildHasherDefault<QuickHasher>;

/// Multiplies what comes, word by word.
#[derive(Default)]
pub struct QuickHasher(u64);

impl QuickHasher {
    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for QuickHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut words = bytes.chunks_exact(8);
        for word in &mut words {
            self.add(u64::from_le_bytes(word.try_into().expect("eight bytes")));
        }
        let rest = words.remainder().iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
        self.add(rest);
    }

    fn write_u16(&mut self, n: u16) {
        self.add(n.into());
    }

    fn write_u64(&mut self, n: u64) {
        self.add(n);
    }

    fn write_usize(&mut self, n: usize) {
        self.add(n as u64);
    }

    /// The table looks at the upper and at the lower bits.
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}
