//! A parser of RESP, the protocol of Redis, as far as a proxy needs it: where a
//! message ends and whether the server pushed it.
//!
//! A message is one line, or a line followed by a number of bytes, or a line followed
//! by a number of messages. The parser copies nothing and does not recurse, however
//! deep a message is nested.

/// The bytes are not RESP, for example because the connection is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// The length of the first message in bytes; `None` if it is not complete.
///
/// ```
/// use dlock_testkit::resp::length;
/// assert_eq!(length(b"*1\r\n$4\r\nPING\r\n+PONG\r\n"), Ok(Some(14)));
/// assert_eq!(length(b"*1\r\n$4\r\nPI"), Ok(None));
/// ```
///
/// # Errors
/// [`Malformed`] if it cannot be a message.
pub fn length(bytes: &[u8]) -> Result<Option<usize>, Malformed> {
    let mut wanted: u64 = 1;
    let mut at = 0;
    while wanted > 0 {
        let Some((kind, line, after)) = line(bytes, at)? else { return Ok(None) };
        at = after;
        wanted -= 1;
        match kind {
            b'+' | b'-' | b':' | b',' | b'(' | b'#' | b'_' => {}
            b'$' | b'!' | b'=' => {
                if let Some(count) = count(line)? {
                    at += usize::try_from(count).map_err(|_| Malformed)? + 2;
                }
            }
            b'*' | b'~' | b'>' => wanted += count(line)?.unwrap_or(0),
            b'%' => wanted += 2 * count(line)?.unwrap_or(0),
            // An attribute stands before the message that it belongs to.
            b'|' => wanted += 2 * count(line)?.unwrap_or(0) + 1,
            _ => return Err(Malformed),
        }
    }
    Ok((at <= bytes.len()).then_some(at))
}

/// A line: its type byte, its content, and the offset after it.
type Line<'a> = (u8, &'a [u8], usize);

/// The line that starts at this offset; `None` if it is not complete.
fn line(bytes: &[u8], at: usize) -> Result<Option<Line<'_>>, Malformed> {
    const LONGEST: usize = 64 * 1024;
    let Some((&kind, rest)) = bytes.get(at..).and_then(<[u8]>::split_first) else {
        return Ok(None);
    };
    if !b"+-:,(#_$!=*~>%|".contains(&kind) {
        return Err(Malformed);
    }
    match rest.iter().position(|&byte| byte == b'\r') {
        Some(end) if rest.get(end + 1).is_none_or(|&byte| byte == b'\n') => {
            let whole = rest.len() > end + 1;
            Ok(whole.then(|| (kind, &rest[..end], at + end + 3)))
        }
        None if rest.len() < LONGEST => Ok(None),
        _ => Err(Malformed),
    }
}

/// The number of bytes or messages in this line; `None` for the null of RESP2.
fn count(line: &[u8]) -> Result<Option<u64>, Malformed> {
    const MOST: u64 = 1 << 30;
    let text = std::str::from_utf8(line).map_err(|_| Malformed)?;
    match text.parse::<i64>().map_err(|_| Malformed)? {
        -1 => Ok(None),
        number => match u64::try_from(number) {
            Ok(number) if number <= MOST => Ok(Some(number)),
            _ => Err(Malformed),
        },
    }
}

/// The first string of a message: the name of a command, or `message` of a push.
pub fn first_word(message: &[u8]) -> Option<&[u8]> {
    let (b'*' | b'>', _, at) = line(message, 0).ok()?? else { return None };
    let (b'$', text, at) = line(message, at).ok()?? else { return None };
    let count = usize::try_from(count(text).ok()??).ok()?;
    message.get(at..at + count)
}

/// Whether this is a push message, which answers no request.
pub fn is_push(message: &[u8]) -> bool {
    message.first() == Some(&b'>')
        || matches!(first_word(message), Some(b"message" | b"pmessage" | b"smessage"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGES: &[&str] = &[
        "+OK\r\n",
        "-ERR no\r\n",
        ":-12\r\n",
        "$0\r\n\r\n",
        "$-1\r\n",
        "*-1\r\n",
        "*0\r\n",
        "$5\r\na\r\nbc\r\n",
        "*2\r\n$1\r\na\r\n*2\r\n:1\r\n*1\r\n+x\r\n",
        "%1\r\n+a\r\n:1\r\n",
        "|1\r\n+ttl\r\n:3\r\n*1\r\n:2\r\n",
        ">2\r\n$7\r\nmessage\r\n$1\r\nc\r\n",
        "_\r\n",
        "#t\r\n",
        ",1.5\r\n",
        "(123456789012345678901\r\n",
        "=7\r\ntxt:abc\r\n",
        "~1\r\n:1\r\n",
    ];

    /// Whole messages are found with and without more behind them, and at every
    /// place where the bytes may be cut the rest is waited for.
    #[test]
    fn messages_end_where_they_end() {
        for message in MESSAGES {
            let whole = message.as_bytes();
            assert_eq!(length(whole), Ok(Some(whole.len())), "{message:?}");
            for cut in 0..whole.len() {
                assert_eq!(length(&whole[..cut]), Ok(None), "{message:?} cut at {cut}");
            }
            for next in MESSAGES {
                let both = format!("{message}{next}");
                assert_eq!(length(both.as_bytes()), Ok(Some(whole.len())), "{both:?}");
            }
        }
    }

    #[test]
    fn other_protocols_are_told() {
        for bytes in [
            b"\x16\x03\x01\x02\x00".as_slice(),
            b"GET / HTTP/1.1\r\n",
            b"$x\r\n",
            b"$-2\r\n",
            b"*99999999999\r\n",
            b"+a\rb",
        ] {
            assert_eq!(length(bytes), Err(Malformed), "{bytes:?}");
        }
        let endless = vec![b'+'; 100_000];
        assert_eq!(length(&endless), Err(Malformed));
    }

    #[test]
    fn deep_nesting_costs_no_stack() {
        let deep = "*1\r\n".repeat(200_000) + ":1\r\n";
        assert_eq!(length(deep.as_bytes()), Ok(Some(deep.len())));
    }

    #[test]
    fn pushes_and_commands_are_told_apart() {
        assert_eq!(first_word(b"*2\r\n$7\r\nEVALSHA\r\n$1\r\nx\r\n"), Some(&b"EVALSHA"[..]));
        assert_eq!(first_word(b"*1\r\n:1\r\n"), None);
        assert!(is_push(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n"));
        assert!(!is_push(b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"));
        assert!(is_push(b">1\r\n+x\r\n"));
        assert!(!is_push(b"*2\r\n$1\r\ng\r\n:1\r\n"));
    }
}
