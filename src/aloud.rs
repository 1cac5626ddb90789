//! What this process says to whoever watches it.
use std::io::Write;

/// Prints `text` and a line's end on standard error, in one write, so that the lines of several ranks do not run into each other.
/// That nobody can hear it (a full disk, a reader that left) ends nothing.
pub(crate) fn aloud(text: &str) {
    say(&mut std::io::stderr(), text);
}

/// [`aloud`] on standard output, for what is a program's answer.
pub(crate) fn answer(text: &str) {
    say(&mut std::io::stdout(), text);
}

fn say(to: &mut impl Write, text: &str) {
    let line = format!("{text}\n");
    to.write_all(line.as_bytes()).and_then(|()| to.flush()).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// Counts writes; takes `most` of them.
    struct Ear {
        heard: Vec<Vec<u8>>,
        most: usize,
    }

    impl Write for Ear {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.heard.len() == self.most {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.heard.push(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_is_one_write_and_one_that_fails_is_lost() {
        let mut ear = Ear { heard: Vec::new(), most: 1 };
        say(&mut ear, "rank 1: two\nlines");
        say(&mut ear, "nobody hears this");
        assert_eq!(ear.heard, [b"rank 1: two\nlines\n"]);
    }
}
