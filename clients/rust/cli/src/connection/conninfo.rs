//! Connection strings: `host=… dbname=…` and `postgresql://…`, as libpq reads them.

use crate::failure::{Failure, Result};
use percent_encoding::percent_decode_str;

/// Keywords and values, in the order of the string.
pub type Pairs = Vec<(String, String)>;

/// Returns true for a connection string, and false for the name of a database.
pub fn is_one(text: &str) -> bool {
    is_url(text) || text.contains('=')
}

fn is_url(text: &str) -> bool {
    text.starts_with("postgresql://") || text.starts_with("postgres://")
}

pub fn parse(text: &str) -> Result<Pairs> {
    match text.split_once("://") {
        Some((_, rest)) if is_url(text) => url(rest),
        _ => keywords(text),
    }
}

fn malformed(what: &str) -> Failure {
    Failure::usage(format!("the connection string cannot be read: {what}"))
}

/// Returns true for the characters that C's `isspace` accepts, all of which are ASCII.
fn is_space(character: char) -> bool {
    character.is_ascii_whitespace() || character == '\x0b'
}

/// `key = value`, where a value with spaces is in single quotes and `\` takes the next character as it is.
fn keywords(text: &str) -> Result<Pairs> {
    let mut pairs = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let (key, value) =
            rest.split_once('=').ok_or_else(|| malformed(&format!("no = after \"{rest}\"")))?;
        let key = key.trim_end_matches(is_space);
        if key.is_empty() || key.contains(is_space) {
            return Err(malformed(&format!("\"{key}\" is no keyword")));
        }
        let (value, after) = value_of(value.trim_start_matches(is_space))?;
        pairs.push((key.to_owned(), value));
        rest = after.trim_start_matches(is_space);
    }
    Ok(pairs)
}

fn value_of(text: &str) -> Result<(String, &str)> {
    let (is_quoted, text) = match text.strip_prefix('\'') {
        Some(inner) => (true, inner),
        None => (false, text),
    };
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => value.extend(characters.next().map(|(_, next)| next)),
            '\'' if is_quoted => return Ok((value, &text[at + 1..])),
            _ if is_space(character) && !is_quoted => return Ok((value, &text[at..])),
            _ => value.push(character),
        }
    }
    if is_quoted {
        return Err(malformed("a quoted value has no end"));
    }
    Ok((value, ""))
}

/// `user:password@host:port,host:port/dbname?key=value&…`, all of it optional.
fn url(text: &str) -> Result<Pairs> {
    // The user and password end at the first @, if no / comes before it. A password may contain a ?.
    let (who, text) = match text.find(['@', '/']) {
        Some(at) if text[at..].starts_with('@') => (&text[..at], &text[at + 1..]),
        _ => ("", text),
    };
    let (text, query) = text.split_once('?').unwrap_or((text, ""));
    let (hosts, dbname) = text.split_once('/').unwrap_or((text, ""));
    let (user, password) = who.split_once(':').unwrap_or((who, ""));
    let hosts: Vec<_> = hosts.split(',').map(host_and_port).collect::<Result<_>>()?;
    // An empty item means the default.
    let (names, ports): (Vec<&str>, Vec<&str>) = hosts.into_iter().unzip();
    let (names, ports) = (names.join(","), ports.join(","));
    let mut pairs = Vec::new();
    for (key, value) in [
        ("user", user),
        ("password", password),
        ("dbname", dbname),
        ("host", &names),
        ("port", &ports),
    ] {
        if !value.is_empty() {
            pairs.push((key.to_owned(), decoded(value)?));
        }
    }
    // An empty value is a value, too.
    for pair in query.strip_suffix('&').unwrap_or(query).split('&').filter(|_| !query.is_empty()) {
        let pair = match pair.split_once('=') {
            Some((key, value)) if !value.contains('=') => (decoded(key)?, decoded(value)?),
            _ => return Err(malformed(&format!("\"{pair}\" is not key=value"))),
        };
        pairs.push(match (&*pair.0, &*pair.1) {
            // libpq accepts this form of JDBC, too.
            ("ssl", "true") => ("sslmode".to_owned(), "require".to_owned()),
            _ => pair,
        });
    }
    Ok(pairs)
}

/// An IPv6 address is in brackets.
fn host_and_port(text: &str) -> Result<(&str, &str)> {
    let Some(inner) = text.strip_prefix('[') else {
        return Ok(text.split_once(':').unwrap_or((text, "")));
    };
    match inner.split_once(']') {
        Some((address, "")) if !address.is_empty() => Ok((address, "")),
        Some((address, rest)) if !address.is_empty() && rest.starts_with(':') => {
            Ok((address, &rest[1..]))
        }
        _ => Err(malformed(&format!("\"{text}\" is no IPv6 address in brackets"))),
    }
}

/// Decodes `%xx`. A `%` without two digits would be kept by the decoder, and name another database than libpq's error. A
/// space is kept by older versions of libpq, and newer ones drop or refuse it.
fn decoded(text: &str) -> Result<String> {
    if text.contains(' ') {
        return Err(malformed("a space in a URL is written %20"));
    }
    for token in text.split('%').skip(1) {
        let is_byte = token.get(..2).is_some_and(|digits| u8::from_str_radix(digits, 16).is_ok());
        if !is_byte || token.starts_with(['+', '-']) || token.starts_with("00") {
            return Err(malformed(&format!("\"%{token}\" begins with no byte in hexadecimal")));
        }
    }
    let decoded = percent_decode_str(text).decode_utf8();
    Ok(decoded.map_err(|_| malformed("it is no UTF-8"))?.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<String> {
        let pairs = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        pairs.into_iter().map(|(key, value)| format!("{key}={value}")).collect()
    }

    #[test]
    fn keywords_and_values() {
        assert_eq!(
            read(r"host = db1,db2 port=5433 password='it\'s a \\ secret' dbname=a\ b user=''"),
            ["host=db1,db2", "port=5433", r"password=it's a \ secret", "dbname=a b", "user="]
        );
        assert_eq!(read("  "), [""; 0]);
        assert_eq!(
            read("user=a\u{a0}b\u{3000}c\x0bdbname=d"),
            ["user=a\u{a0}b\u{3000}c", "dbname=d"]
        );
        for bad in ["host=a dbname", "a b=c", "user='x"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn urls() {
        assert_eq!(
            read("postgresql://me:p%40ss@db1:5433,[::1]:5434/shop?sslmode=verify-full&ssl=true"),
            [
                "user=me",
                "password=p@ss",
                "dbname=shop",
                "host=db1,::1",
                "port=5433,5434",
                "sslmode=verify-full",
                "sslmode=require"
            ]
        );
        assert_eq!(read("postgres://"), [""; 0]);
        assert_eq!(read("postgres://db1,db2"), ["host=db1,db2", "port=,"]);
        assert_eq!(read("postgres:///shop?host=/tmp"), ["dbname=shop", "host=/tmp"]);
        assert_eq!(read("postgres://%2Ftmp/shop"), ["dbname=shop", "host=/tmp"]);
        assert_eq!(read("postgres://me:p?w@db"), ["user=me", "password=p?w", "host=db"]);
        assert_eq!(
            read("postgres://db/shop?user=a@b&port=&"),
            ["dbname=shop", "host=db", "user=a@b", "port="]
        );
        for bad in
            ["db/a%zz", "db/a%2", "db/a%+1", "db/%00", "db?sslmode", "db?options=a=b", "db?&user=a"]
        {
            assert!(parse(&format!("postgres://{bad}")).is_err(), "{bad}");
        }
        assert_eq!(read("postgres://db/a%20b"), ["dbname=a b", "host=db"]);
        for bad in [" db", "db/shop ", "db/a b", "me: @db", "db?user= a"] {
            assert!(parse(&format!("postgres://{bad}")).is_err(), "{bad}");
        }
        for bad in ["[]", "[::1", "[::1]5432"] {
            assert!(parse(&format!("postgres://{bad}/shop")).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_name_of_a_database_is_no_connection_string() {
        assert!(!is_one("shop"));
        assert!(is_one("dbname=shop") && is_one("postgres://db") && is_one("postgresql:///shop"));
    }
}
