//! Limits on the length of texts in DETAIL. A key of several megabytes, logged with each refused write, would fill the
//! disk of the log; a client that shows DETAIL would show nothing else.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

/// The longest text in DETAIL, in bytes of its JSON form.
const TEXT_MAX: usize = 256;
/// The longest key in DETAIL, as the sum of its values' bytes.
const KEY_MAX: usize = 512;
/// The number of key columns that DETAIL shows.
const COLUMNS_MAX: usize = 8;
/// Marks an omission. It is ASCII because not every encoding of a database has an ellipsis.
const LEFT_OUT: &str = "...";

/// Writes a text of DETAIL, at most `TEXT_MAX` bytes of it.
pub fn text<S: Serializer>(text: &Option<String>, to: S) -> Result<S::Ok, S::Error> {
    text.as_deref().map(|text| cut(text, TEXT_MAX)).serialize(to)
}

/// Writes a row's key, with its values truncated to their share of `KEY_MAX`.
pub fn key<S: Serializer>(key: &Option<Map<String, Value>>, to: S) -> Result<S::Ok, S::Error> {
    key.as_ref().map(cut_key).serialize(to)
}

/// A row's key as shown in DETAIL.
pub fn cut_key(key: &Map<String, Value>) -> Map<String, Value> {
    let shown = key.len().min(COLUMNS_MAX);
    let most = TEXT_MAX.min(KEY_MAX / shown.max(1));
    let columns = key.iter().take(shown).map(|(name, value)| {
        let value = match value {
            Value::String(text) => Value::from(cut(text, most)),
            other => other.clone(),
        };
        (cut(name, TEXT_MAX / 4), value)
    });
    let mut cut: Map<String, Value> = columns.collect();
    if shown < key.len() {
        cut.insert(LEFT_OUT.into(), format!("{} more columns", key.len() - shown).into());
    }
    cut
}

/// Truncates a text to at most `most` bytes of JSON.
fn cut(text: &str, most: usize) -> String {
    let mut bytes = 0;
    let mut fits = 0;
    for (at, c) in text.char_indices() {
        if bytes + LEFT_OUT.len() <= most {
            fits = at;
        }
        bytes += json_len(c);
        if bytes > most {
            return format!("{}{LEFT_OUT}", &text[..fits]);
        }
    }
    text.to_owned()
}

/// The number of bytes that a character takes in a JSON string.
fn json_len(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        c if c < ' ' => 6,
        c => c.len_utf8(),
    }
}
