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

/// The longest answer: far more than the scripts and the operators ever get. A server that
/// sends more is none, and its bytes must not fill the memory.
pub(super) const LONGEST: usize = 64 * 1024 * 1024;
/// The longest line: a refusal, or the length of something.
const LONGEST_LINE: usize = 64 * 1024;

/// Looks for the end of the first answer; goes on where it stopped when more bytes came.
#[derive(Default)]
pub(super) struct FrameScanner {
    /// Up to where it has looked.
    position: usize,
    /// Up to where there is no end of the line that begins at the position.
    searched: usize,
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
            let (after, values) = self.value(bytes, start)?;
            self.position = after;
            match (self.missing - 1).checked_add(values) {
                // Each of them takes three bytes or more.
                Some(missing) if missing <= (LONGEST / 3) as u64 => self.missing = missing,
                _ => return self.fail(),
            }
        }
        (!self.broken).then_some(self.position)
    }

    /// The end of the value at the position, or of the start of a collection, and how
    /// many values the collection has.
    fn value(&mut self, bytes: &[u8], start: usize) -> Option<(usize, u64)> {
        let rest = bytes.get(self.position..)?;
        let searched = self.searched.saturating_sub(self.position).min(rest.len());
        let Some(line) = rest[searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = bytes.len();
            return if rest.len() > LONGEST_LINE { self.fail() } else { None };
        };
        let line = searched + line;
        let after = self.position + line + 1;
        if line > LONGEST_LINE || after - start > LONGEST {
            return self.fail();
        }
        let length = || -> Option<i64> {
            std::str::from_utf8(rest.get(1..line)?).ok()?.trim_end().parse().ok()
        };
        let times = match rest[0] {
            b'+' | b'-' | b':' | b'_' | b'#' | b',' | b'(' => return Some((after, 0)),
            b'$' | b'=' | b'!' => {
                let Some(length) = length() else { return self.fail() };
                let Ok(length) = usize::try_from(length) else { return Some((after, 0)) };
                if length > LONGEST - (after - start) {
                    return self.fail();
                }
                let end = after + length + 2;
                return (bytes.len() >= end).then_some((end, 0));
            }
            b'*' | b'~' | b'>' => 1,
            b'%' => 2,
            b'|' => 2,
            _ => return self.fail(),
        };
        let Some(length) = length() else { return self.fail() };
        let values = u64::try_from(length).unwrap_or(0).saturating_mul(times);
        // What an attribute belongs to comes behind it.
        Some((after, values.saturating_add(u64::from(rest[0] == b'|'))))
    }

    fn fail<T>(&mut self) -> Option<T> {
        self.broken = true;
        None
    }

    /// This many bytes at the front are gone.
    pub(super) fn rebase(&mut self, gone: usize) {
        self.position = self.position.saturating_sub(gone);
        self.searched = self.searched.saturating_sub(gone);
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

    /// Reads a stream as it arrives, and tells how many bytes were kept at most and how many
    /// answers there were.
    fn scan(chunks: impl Iterator<Item = Vec<u8>>) -> (usize, usize, bool) {
        let (mut scanner, mut bytes) = (FrameScanner::default(), Vec::new());
        let (mut most, mut answers) = (0, 0);
        for chunk in chunks {
            bytes.extend_from_slice(&chunk);
            most = most.max(bytes.len());
            let mut start = 0;
            while let Some(end) = scanner.frame_end(&bytes, start) {
                assert!(end > start && end <= bytes.len());
                if let Ok(answer) = redis::parse_redis_value(&bytes[start..end]) {
                    let _ = Frame::of(answer, answers % 2 == 0);
                }
                (start, answers) = (end, answers + 1);
            }
            bytes.drain(..start);
            scanner.rebase(start);
            if scanner.is_broken() {
                return (most, answers, true);
            }
        }
        (most, answers, false)
    }

    #[test]
    fn what_would_fill_the_memory_is_given_up() {
        let endless = |head: &[u8]| {
            let head = std::iter::once(head.to_vec());
            head.chain(std::iter::repeat_n(vec![b'x'; 16 * 1024], 2 * LONGEST / (16 * 1024)))
        };
        for head in [
            &b"$4611686018427387904\r\n"[..],
            b"$9223372036854775807\r\n",
            b"$67108865\r\n",
            b"+",
            b"$",
            b"*3\r\n%9223372036854775807\r\n",
            b"*9223372036854775807\r\n",
            b"|9223372036854775807\r\n",
            b"*2\r\n$67000000\r\n",
        ] {
            let began = std::time::Instant::now();
            let (most, _, broken) = scan(endless(head));
            let head = String::from_utf8_lossy(head);
            assert!(broken && most <= LONGEST + 64 * 1024, "{head:?}: {most} bytes");
            assert!(began.elapsed().as_secs() < 10, "{head:?}: {:?}", began.elapsed());
        }
        // Many small values, without an end.
        let small = std::iter::once(b"*20000000\r\n".to_vec());
        let small = small.chain(std::iter::repeat_n(b":1234567\r\n".repeat(8 * 1024), 1_000));
        let (most, _, broken) = scan(small);
        assert!(broken && most <= LONGEST + 128 * 1024, "{most} bytes");
        // The largest answer that will do.
        let large = [b"$60000000\r\n".to_vec(), vec![b'x'; 60_000_000], b"\r\n".to_vec()];
        assert_eq!(scan(large.into_iter()).1, 1);
    }

    /// A value as a server writes it.
    fn random_value(rng: &mut rand::rngs::StdRng, depth: u32, into: &mut Vec<u8>) {
        use rand::RngExt as _;
        let kinds = if depth == 0 { 8 } else { 12 };
        let count = rng.random_range(0..4_u32);
        let text = |rng: &mut rand::rngs::StdRng| -> Vec<u8> {
            (0..count * 3).map(|_| rng.random_range(b' '..=b'~')).collect()
        };
        let line = |into: &mut Vec<u8>, kind: &str, rest: &[u8]| {
            into.extend_from_slice(kind.as_bytes());
            into.extend_from_slice(rest);
            into.extend_from_slice(b"\r\n");
        };
        match rng.random_range(0..kinds) {
            0 => line(into, "+", &text(rng)),
            1 => line(into, "-ERR ", &text(rng)),
            2 => line(into, ":", rng.random::<i64>().to_string().as_bytes()),
            3 => line(into, "_", b""),
            4 => line(into, "#", b"t"),
            5 => line(into, "$", b"-1"),
            6 | 7 => {
                let bytes: Vec<u8> = (0..count * 5).map(|_| rng.random()).collect();
                line(into, "$", bytes.len().to_string().as_bytes());
                line(into, "", &bytes);
            }
            kind => {
                let (sign, times) = [("*", 1), ("~", 1), ("%", 2), (">", 1)][kind as usize - 8];
                line(into, sign, count.to_string().as_bytes());
                (0..count * times).for_each(|_| random_value(rng, depth - 1, into));
            }
        }
    }

    /// Streams by chance, whole and with bytes that were changed, in pieces: the ends of whole
    /// ones are found, and nothing panics or keeps more than it was given.
    #[test]
    fn any_stream_is_read() {
        use rand::{RngExt as _, SeedableRng as _};
        for seed in 0..3_000 {
            let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
            let (mut stream, count) = (Vec::new(), rng.random_range(1..6));
            (0..count).for_each(|_| random_value(&mut rng, 3, &mut stream));
            let pieces = |stream: &[u8], step: usize| -> Vec<Vec<u8>> {
                stream.chunks(step).map(<[u8]>::to_vec).collect()
            };
            let step = rng.random_range(1..40);
            let (_, answers, broken) = scan(pieces(&stream, step).into_iter());
            assert_eq!((answers, broken), (count, false), "seed {seed}");
            for _ in 0..rng.random_range(1..4) {
                let place = rng.random_range(0..stream.len());
                stream[place] = *b"$*%|9\r\n-\x00\xff+:".get(rng.random_range(0..13)).unwrap_or(&0);
            }
            scan(pieces(&stream, step).into_iter());
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
