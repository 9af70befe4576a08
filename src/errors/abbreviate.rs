//! How much of a text DETAIL shows. A key of several megabytes, written to the log with every refused write,
//! would fill the log's disk; a client that shows DETAIL would show nothing else.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

/// The most bytes that one text takes in DETAIL, as JSON writes it.
const TEXT_MAX: usize = 256;
/// The most bytes that the values of a key's columns take together.
const KEY_MAX: usize = 512;
/// The most columns of a key that are shown.
const COLUMNS_MAX: usize = 8;
/// Stands for what was left out. Plain ASCII: not every encoding of a database has an ellipsis.
const LEFT_OUT: &str = "...";

/// A text of DETAIL, at most `TEXT_MAX` bytes of it.
pub fn text<S: Serializer>(text: &Option<String>, to: S) -> Result<S::Ok, S::Error> {
    text.as_deref().map(|text| cut(text, TEXT_MAX)).serialize(to)
}

/// A row's key, its values cut to what all of them may take together.
pub fn key<S: Serializer>(key: &Option<Map<String, Value>>, to: S) -> Result<S::Ok, S::Error> {
    key.as_ref().map(cut_key).serialize(to)
}

/// A row's key as DETAIL shows it.
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

/// The text, or as much of its beginning as JSON writes in so many bytes.
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

/// How many bytes a character takes inside a string of JSON.
fn json_len(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        c if c < ' ' => 6,
        c => c.len_utf8(),
    }
}
