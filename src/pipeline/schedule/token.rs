//! The spelling of one instruction, in texts and in errors.
//!
//! | text | instruction |
//! |---|---|
//! | `2F0`, `2F0@5` | F of stage 2, micro-batch 0; reading version 5 |
//! | `2B0`, `2I0`, `2W0` | B, I, W |
//! | `2A3` | `Reduce` (all-reduce) of stage 2, up to micro-batch 3 |
//! | `2U`, `2U+` | `Step` (update) of stage 2; keeping the old version |
//! | `2D5` | `Free`: stage 2 drops version 5 |
//! | `P3>0`, `R3>0`, `S3>0`, `W3>0` | `Post`, `Recv`, `Send`, `Wait` for the value of edge 3, micro-batch 0 |
//! | `P3<0` … | the same for the gradient on its way back |
use super::{Direction, Inst, Message, Read};
use std::{fmt, str::FromStr};

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arrow = if self.direction == Direction::Forward { '>' } else { '<' };
        write!(f, "{}{arrow}{}", self.edge, self.mb)
    }
}

impl fmt::Display for Inst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Inst::F { stage, mb, read: Read::Current } => write!(f, "{stage}F{mb}"),
            Inst::F { stage, mb, read: Read::At(version) } => write!(f, "{stage}F{mb}@{version}"),
            Inst::B { stage, mb } => write!(f, "{stage}B{mb}"),
            Inst::I { stage, mb } => write!(f, "{stage}I{mb}"),
            Inst::W { stage, mb } => write!(f, "{stage}W{mb}"),
            Inst::Reduce { stage, mb } => write!(f, "{stage}A{mb}"),
            Inst::Step { stage, keep: false } => write!(f, "{stage}U"),
            Inst::Step { stage, keep: true } => write!(f, "{stage}U+"),
            Inst::Free { stage, version } => write!(f, "{stage}D{version}"),
            Inst::Post(m) => write!(f, "P{m}"),
            Inst::Recv(m) => write!(f, "R{m}"),
            Inst::Send(m) => write!(f, "S{m}"),
            Inst::Wait(m) => write!(f, "W{m}"),
        }
    }
}

/// Where in a token something else was expected, and what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unexpected {
    /// The offset in bytes.
    pub at: usize,
    /// What was expected there.
    pub expected: &'static str,
}

impl fmt::Display for Unexpected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} expected at character {}", self.expected, self.at + 1)
    }
}

impl std::error::Error for Unexpected {}

impl FromStr for Inst {
    type Err = Unexpected;

    fn from_str(text: &str) -> Result<Inst, Unexpected> {
        let mut rest = Rest { text, at: 0 };
        let inst = if text.starts_with(|c: char| c.is_ascii_digit()) { rest.compute()? } else { rest.communication()? };
        if rest.at < text.len() {
            return Err(rest.expected("the end of the instruction"));
        }
        Ok(inst)
    }
}

/// What is still to be read of a token.
struct Rest<'a> {
    text: &'a str,
    at: usize,
}

impl Rest<'_> {
    fn expected(&self, expected: &'static str) -> Unexpected {
        Unexpected { at: self.at, expected }
    }

    /// The next character, taken if it is one of `any`.
    fn take(&mut self, any: &str) -> Option<char> {
        let next = self.text[self.at..].chars().next().filter(|&c| any.contains(c))?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn number(&mut self, what: &'static str) -> Result<usize, Unexpected> {
        let rest = &self.text[self.at..];
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        // Numbers are shifted as signed ones.
        let number = rest[..digits].parse().ok().filter(|&n: &usize| isize::try_from(n).is_ok());
        let number = number.ok_or(self.expected(what))?;
        self.at += digits;
        Ok(number)
    }

    fn compute(&mut self) -> Result<Inst, Unexpected> {
        let stage = self.number("a stage")?;
        let op = self.take("FBIWAUD").ok_or(self.expected("one of F B I W A U D"))?;
        Ok(match op {
            'U' => Inst::Step { stage, keep: self.take("+").is_some() },
            'D' => Inst::Free { stage, version: self.number("a version")? },
            _ => {
                let mb = self.number("a micro-batch")?;
                match op {
                    'A' => Inst::Reduce { stage, mb },
                    'B' => Inst::B { stage, mb },
                    'I' => Inst::I { stage, mb },
                    'W' => Inst::W { stage, mb },
                    _ => {
                        let at = self.take("@").is_some();
                        let read = if at { Read::At(self.number("a version")?) } else { Read::Current };
                        Inst::F { stage, mb, read }
                    }
                }
            }
        })
    }

    fn communication(&mut self) -> Result<Inst, Unexpected> {
        let op = self.take("PRSW").ok_or(self.expected("a stage, or one of P R S W"))?;
        let edge = self.number("an edge")?;
        let arrow = self.take("<>").ok_or(self.expected("> (value) or < (gradient)"))?;
        let direction = if arrow == '>' { Direction::Forward } else { Direction::Backward };
        let message = Message { edge, mb: self.number("a micro-batch")?, direction };
        Ok(match op {
            'P' => Inst::Post(message),
            'R' => Inst::Recv(message),
            'S' => Inst::Send(message),
            _ => Inst::Wait(message),
        })
    }
}
