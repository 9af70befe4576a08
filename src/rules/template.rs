//! Templates of the name of the lease that guards a row: literal text with `{column}` placeholders, and `{{` and `}}`
//! for braces.

/// A part of a template.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Piece {
    /// Literal text.
    Literal(Vec<u8>),
    /// A placeholder, replaced by the text of the row's column of this name.
    Column(Vec<u8>),
}

/// The longest template in bytes, more than sixteen times the longest name.
pub const TEMPLATE_MAX: usize = 8192;

/// Parses a template; the error says what is wrong with it. This is the only parser: the trigger uses it, and the SQL
/// functions that attach and audit triggers do so through the trigger.
pub fn parse(template: &[u8]) -> Result<Vec<Piece>, &'static str> {
    if template.len() > TEMPLATE_MAX {
        return Err("it is longer than 8192 bytes");
    }
    // Most templates are a plain name.
    if !template.is_empty() && !template.iter().any(|byte| matches!(byte, b'{' | b'}')) {
        return Ok(vec![Piece::Literal(template.to_vec())]);
    }
    let mut pieces = Vec::new();
    let mut literal = Vec::new();
    let mut rest = template.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        match byte {
            b'{' if rest.peek() == Some(&b'{') => {
                rest.next();
                literal.push(b'{');
            }
            b'}' if rest.peek() == Some(&b'}') => {
                rest.next();
                literal.push(b'}');
            }
            b'{' => {
                let mut column = Vec::new();
                loop {
                    match rest.next() {
                        Some(b'}') => break,
                        Some(b'{') | None => return Err("a { has no matching }"),
                        Some(byte) => column.push(byte),
                    }
                }
                if column.is_empty() {
                    return Err("a placeholder names no column");
                }
                if !literal.is_empty() {
                    pieces.push(Piece::Literal(std::mem::take(&mut literal)));
                }
                pieces.push(Piece::Column(column));
            }
            b'}' => return Err("a } has no matching {"),
            byte => literal.push(byte),
        }
    }
    if !literal.is_empty() {
        pieces.push(Piece::Literal(literal));
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces() {
        let lit = |s: &str| Piece::Literal(s.into());
        let col = |s: &str| Piece::Column(s.into());
        assert_eq!(parse(b"order:{id}"), Ok(vec![lit("order:"), col("id")]));
        assert_eq!(parse(b"{a}{b}"), Ok(vec![col("a"), col("b")]));
        assert_eq!(parse(b"x{{{a}}}y"), Ok(vec![lit("x{"), col("a"), lit("}y")]));
        assert_eq!(parse(b"plain"), Ok(vec![lit("plain")]));
        for bad in ["{", "}", "{}", "a{b", "a}b", "{a{b}"] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
