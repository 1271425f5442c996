//! Where an answer ends in a stream of bytes, by the Redis serialization protocol. What
//! it says is read by the driver crate.

use redis::{PushKind, Value};

/// What a server sends.
pub(super) enum Frame {
    /// The answer to a request.
    Answer(Value),
    /// A message of a subscription.
    Message(Vec<u8>),
    /// What nobody asked for.
    Other,
}

impl Frame {
    /// In the older protocol messages look like answers.
    pub(super) fn of(value: Value, is_subscriber: bool) -> Self {
        match value {
            Value::Push { kind: PushKind::Message, data } if is_subscriber => Self::message(data),
            Value::Push { kind: PushKind::Subscribe, data } if is_subscriber => {
                Frame::Answer(Value::Array(data))
            }
            Value::Push { .. } => Frame::Other,
            Value::Array(data) if is_subscriber && is_message(&data) => Self::message(data),
            answer => Frame::Answer(answer),
        }
    }

    fn message(mut data: Vec<Value>) -> Self {
        match data.pop() {
            Some(Value::BulkString(message)) => Frame::Message(message),
            _ => Frame::Other,
        }
    }
}

fn is_message(data: &[Value]) -> bool {
    matches!(data, [Value::BulkString(kind), _, _] if kind == b"message")
}

/// Looks for the end of the first answer; goes on where it stopped when more bytes came.
#[derive(Default)]
pub(super) struct FrameScanner {
    /// Up to where it has looked.
    position: usize,
    /// How many values are still to come until the answer is complete, when it has
    /// begun.
    missing: u64,
    broken: bool,
}

impl FrameScanner {
    /// The end of the answer that begins at `start`, if it is complete.
    pub(super) fn frame_end(&mut self, bytes: &[u8], start: usize) -> Option<usize> {
        if self.missing == 0 {
            self.position = start;
            self.missing = 1;
        }
        while self.missing > 0 && !self.broken {
            let (after, values) = self.value(bytes)?;
            self.position = after;
            self.missing = self.missing - 1 + values;
        }
        (!self.broken).then_some(self.position)
    }

    /// The end of the value at the position, or of the start of a collection, and how
    /// many values the collection has.
    fn value(&mut self, bytes: &[u8]) -> Option<(usize, u64)> {
        let rest = bytes.get(self.position..)?;
        let line = rest.iter().position(|byte| *byte == b'\n')?;
        let after = self.position + line + 1;
        let length = || -> Option<i64> {
            std::str::from_utf8(rest.get(1..line)?).ok()?.trim_end().parse().ok()
        };
        let times = match rest[0] {
            b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => return Some((after, 0)),
            b'$' | b'=' | b'!' => {
                let Some(length) = length() else { return self.fail() };
                let Ok(length) = usize::try_from(length) else { return Some((after, 0)) };
                let end = after + length + 2;
                return (bytes.len() >= end).then_some((end, 0));
            }
            b'*' | b'~' | b'>' => 1,
            b'%' => 2,
            b'|' => 2,
            _ => return self.fail(),
        };
        let Some(length) = length() else { return self.fail() };
        let values = u64::try_from(length).unwrap_or(0) * times;
        // What an attribute belongs to comes behind it.
        Some((after, values + u64::from(rest[0] == b'|')))
    }

    fn fail<T>(&mut self) -> Option<T> {
        self.broken = true;
        None
    }

    /// This many bytes at the front are gone.
    pub(super) fn rebase(&mut self, gone: usize) {
        self.position = self.position.saturating_sub(gone);
    }

    /// Whether something was no answer.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_where_its_last_value_ends() {
        let answers: [&[u8]; 12] = [
            b"+OK\r\n",
            b"-ERR no\r\n",
            b":12\r\n",
            b"$-1\r\n",
            b"$5\r\na\r\nb\r\r\n",
            b"*-1\r\n",
            b"*0\r\n",
            b"*3\r\n:1\r\n*2\r\n$1\r\ng\r\n:7\r\n-ERR x\r\n",
            b"_\r\n",
            b"%1\r\n+a\r\n:1\r\n",
            b"|1\r\n+ttl\r\n:9\r\n$2\r\nhi\r\n",
            b">2\r\n+message\r\n$0\r\n\r\n",
        ];
        let all = answers.concat();
        for step in [1, 2, 3, 7, all.len()] {
            let mut scanner = FrameScanner::default();
            let (mut bytes, mut ends) = (Vec::new(), Vec::new());
            let (mut start, mut gone) = (0, 0);
            for chunk in all.chunks(step) {
                bytes.extend_from_slice(chunk);
                while let Some(end) = scanner.frame_end(&bytes, start) {
                    ends.push(gone + end);
                    start = end;
                }
                bytes.drain(..start);
                scanner.rebase(start);
                (gone, start) = (gone + start, 0);
            }
            let mut end = 0;
            let expected: Vec<usize> = answers
                .iter()
                .map(|answer| {
                    end += answer.len();
                    end
                })
                .collect();
            assert_eq!(ends, expected, "in steps of {step}");
            assert!(!scanner.is_broken());
        }
    }

    #[test]
    fn what_is_no_answer_is_told() {
        for nonsense in ["HTTP/1.1 400 Bad Request\r\n", "$x\r\n", "*1\r\n?\r\n"] {
            let mut scanner = FrameScanner::default();
            assert_eq!(scanner.frame_end(nonsense.as_bytes(), 0), None);
            assert!(scanner.is_broken(), "{nonsense}");
        }
    }
}
