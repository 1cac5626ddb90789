//! Programs as text: what is printed, that it is read back as it was, and what is said of texts that are wrong.
use pipewright::pipeline::schedule::{
    Direction, Inst, Kind, Message, Program, Programs, Read, WeightPolicy, Wiring, lower, make,
};
use proptest::prelude::*;

/// The text without its comments.
fn bare(programs: &Programs) -> String {
    programs.to_text().lines().filter(|l| !l.starts_with('#')).map(|l| format!("{l}\n")).collect()
}

#[test]
fn small_programs_are_printed_as_expected() {
    let text = |kind, workers, micro_batches| bare(&make(kind, workers, micro_batches).unwrap());
    assert_eq!(
        text(Kind::GPipe, 2, 2),
        "\
weights stashed
micro-batches 2
step-every 2

worker 0
  repeat 1 shift 2 version-shift 1 {
    0F0 0F1 0B0 0B1 0U
  }

worker 1
  repeat 1 shift 2 version-shift 1 {
    1F0 1F1 1B0 1B1 1U
  }
"
    );
    assert_eq!(
        text(Kind::OneFOneB, 3, 4),
        "\
weights stashed
micro-batches 4
step-every 4

worker 0
  repeat 1 shift 4 version-shift 1 {
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U
  }

worker 1
  repeat 1 shift 4 version-shift 1 {
    1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1U
  }

worker 2
  repeat 1 shift 4 version-shift 1 {
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U
  }
"
    );
    assert_eq!(
        text(Kind::PipeDreamNoStash, 3, 5),
        "\
weights current
micro-batches 5
step-every 1

worker 0
  0F0 0F1
  repeat 3 shift 1 version-shift 1 {
    0F2 0B0 0U
  }
  0B0 0U 0B1 0U

worker 1
  1F0
  repeat 4 shift 1 version-shift 1 {
    1F1 1B0 1U
  }
  1B0 1U

worker 2
  repeat 5 shift 1 version-shift 1 {
    2F0 2B0 2U
  }
"
    );
}

#[test]
fn messages_are_printed_where_they_stand() {
    let programs = lower(&make(Kind::PipeDream, 2, 5).unwrap(), &Wiring::straight(2)).unwrap();
    assert_eq!(
        bare(&programs),
        "\
weights stashed
micro-batches 5
step-every 1

worker 0
  0F0 S0>0 P0<0
  repeat 4 shift 1 version-shift 1 {
    0F1 W0>0 S0>1 P0<1 R0<0 0B0 0U
  }
  R0<0 0B0 0U W0>0

worker 1
  P0>0 R0>0 1F0 P0>1 1B0 S0<0 1U
  repeat 3 shift 1 version-shift 1 {
    R0>1 1F1 P0>2 1B1 W0<0 S0<1 1U
  }
  R0>1 1F1 1B1 W0<0 S0<1 1U W0<1
"
    );
}

#[test]
fn every_schedule_is_read_back() {
    for kind in Kind::ALL {
        for workers in 1..=6 {
            for m in (1..=12).chain([1 << 40]).filter(|&m| m < 1000 || !kind.is_synchronous()) {
                let plain = make(kind, workers, m).unwrap();
                let lowered = lower(&plain, &Wiring::straight(workers)).unwrap();
                for programs in [plain, lowered] {
                    let text = programs.to_text();
                    assert_eq!(Programs::from_text(&text).unwrap(), programs, "{text}");
                    assert!(text.lines().all(|l| l.len() <= 125), "{text}");
                }
            }
        }
    }
}

fn number() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..20, Just(isize::MAX as usize), 0..=isize::MAX as usize]
}

fn inst() -> impl Strategy<Value = Inst> {
    (0u8..10, number(), number(), number(), any::<bool>()).prop_map(|(op, stage, mb, version, yes)| {
        let direction = if yes { Direction::Forward } else { Direction::Backward };
        let message = Message { edge: stage, mb, direction };
        match op {
            0 => Inst::F { stage, mb, read: if yes { Read::Current } else { Read::At(version) } },
            1 => Inst::B { stage, mb },
            2 => Inst::I { stage, mb },
            3 => Inst::W { stage, mb },
            4 => Inst::Step { stage, keep: yes },
            5 => Inst::Free { stage, version },
            6 => Inst::Post(message),
            7 => Inst::Recv(message),
            8 => Inst::Send(message),
            _ => Inst::Wait(message),
        }
    })
}

fn program() -> impl Strategy<Value = Program> {
    let insts = || prop::collection::vec(inst(), 0..30);
    let repeat = prop_oneof![Just((0, 0, 0)), (number(), number(), number())];
    (insts(), insts(), repeat, insts()).prop_map(|(prologue, period, (repeats, shift, version_shift), epilogue)| {
        Program { prologue, period, repeats, shift, version_shift, epilogue }
    })
}

fn programs() -> impl Strategy<Value = Programs> {
    let workers = prop::collection::vec(program(), 1..4);
    (workers, any::<[bool; 2]>(), number(), number()).prop_map(
        |(workers, [stashed, each_replica], micro_batches, step_every)| {
            let weights = if stashed { WeightPolicy::Stashed } else { WeightPolicy::Current };
            Programs { workers, weights, micro_batches, step_every, each_replica }
        },
    )
}

proptest! {
    #[test]
    fn any_programs_are_read_back(programs in programs()) {
        prop_assert_eq!(Programs::from_text(&programs.to_text())?, programs);
    }

    /// How a person lays the text out does not matter.
    #[test]
    fn layout_and_comments_do_not_matter(programs in programs(), breaks in prop::collection::vec(0u8..4, 1..20)) {
        let spaces = breaks.iter().map(|b| [" ", "\n", "\t  ", " # a remark {\r\n"][*b as usize]).cycle();
        let text: String = bare(&programs).split_whitespace().zip(spaces).flat_map(|(w, s)| [w, s]).collect();
        prop_assert_eq!(Programs::from_text(&text)?, programs);
    }

    /// A text that was cut off or spoilt is an error with a place, or is read; it never panics.
    #[test]
    fn spoilt_texts_are_errors(at in 0.0..1.0, with in "[ -~é]?", delete in 0usize..9) {
        let text = bare(&lower(&make(Kind::PipeDreamVertical, 3, 9).unwrap(), &Wiring::straight(3)).unwrap());
        let at = (text.len() as f64 * at) as usize;
        let spoilt = format!("{}{with}{}", &text[..at], &text[(at + delete).min(text.len())..]);
        if let Err(e) = Programs::from_text(&spoilt) {
            prop_assert!(e.to_string().contains("line "), "{}", e);
        }
    }
}

#[test]
fn wrong_texts_are_told_by_line_and_column() {
    let head = "weights stashed\nmicro-batches 2\nstep-every 1\n";
    let cases = [
        ("", "line 1, column 1: `weights` expected, got the end"),
        ("# nothing\n\n", "line 2, column 1: `weights` expected, got the end"),
        ("weights fresh", "line 1, column 9: `stashed` or `current` expected, got \"fresh\""),
        ("weights stashed\nstep-every 1", "line 2, column 1: `micro-batches` expected, got \"step-every\""),
        ("weights stashed micro-batches -2", "line 1, column 31: a number expected, got \"-2\""),
        ("weights stashed micro-batches 9223372036854775808", "line 1, column 31: a number expected"),
        ("{head}", "line 3, column 13: `worker` expected, got the end"),
        ("{head}0F0", "line 4, column 1: `worker` expected, got \"0F0\""),
        ("{head}worker 1", "line 4, column 1: worker 0 expected, got worker 1"),
        ("{head}worker 0 0F0\nworker 0", "line 5, column 1: worker 1 expected, got worker 0"),
        ("{head}worker 0\n  0F0 é 0B0", "line 5, column 7: an instruction, `repeat` or `worker` expected, got \"é\""),
        ("{head}worker 0\n  0F0 # fine\n  0X1", "line 6, column 4: one of F B I W A U D expected in \"0X1\""),
        ("{head}worker 0\n\t0F", "line 5, column 4: a micro-batch expected in \"0F\""),
        ("{head}worker 0 0F0@", "line 4, column 14: a version expected in \"0F0@\""),
        ("{head}worker 0 0F0é", "line 4, column 13: the end of the instruction expected in \"0F0é\""),
        ("{head}worker 0 S0>9223372036854775808", "line 4, column 13: a micro-batch expected"),
        ("{head}worker 0 Send", "line 4, column 11: an edge expected in \"Send\""),
        ("{head}worker 0 P3=0", "line 4, column 12: > (value) or < (gradient) expected"),
        ("{head}worker 0 repeat 2 {", "line 4, column 19: `shift` expected, got \"{\""),
        ("{head}worker 0 repeat 2 shift 1 version-shift 1 0F0", "line 4, column 43: `{` expected, got \"0F0\""),
        (
            "{head}worker 0 repeat 2 shift 1 version-shift 1 {0F0",
            "column 47: an instruction or `}` expected, got the end",
        ),
        ("{head}worker 0 repeat 2 shift 1 version-shift 1 {0F0}{", "column 48: an instruction, `repeat` or `worker`"),
        (
            "{head}worker 0 repeat 0 shift 0 version-shift 0 {}\nrepeat 0 shift 0 version-shift 0 {}",
            "line 5, column 1: an instruction or `worker` (a worker has one `repeat`) expected, got \"repeat\"",
        ),
    ];
    for (text, expected) in cases {
        let error = Programs::from_text(&text.replace("{head}", head)).expect_err(text).to_string();
        assert!(error.contains(expected), "{text:?}: {expected:?} is not in {error:?}");
    }
}

#[test]
fn files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.txt");
    assert!(Programs::load(&file).unwrap_err().to_string().contains("mine.txt"));
    std::fs::write(&file, "weights").unwrap();
    let error = Programs::load(&file).unwrap_err().to_string();
    assert!(error.contains("line 1, column 8") && error.contains("mine.txt"), "{error}");
}
